"""How a step takes blocks back from stores that read them: the one fence of the scheduler side.

What is always true: before anybody writes a block that a store reads, that store is revoked or has
ended. There are two ways, and callers need not know which one is in use:

- Each step lists the stores that read blocks which it gives away, and each worker ends those before
  the step goes on (`worker.rank_stores`). This is done always.
- If the runner writes blocks before it tells connectors (`checks.writes_before_it_tells`) the list
  would come too late. Then the ranks share a page with the scheduler, each store has a word in it,
  and the scheduler sets the word before any worker gets the step. The server reads the word between
  copy and commit.
"""

from hotkv_client.fence import Revocations


class Fence:
    """Words of stores. Without `revocations` the workers alone take blocks back."""

    def __init__(self, revocations: Revocations | None = None) -> None:
        self.revocations = revocations

    def __repr__(self) -> str:
        return f"Fence({self.revocations or 'workers take back'})"

    def take(self) -> int | None:
        """A word for a new store, 0 if it needs none. None if all words are in use: the store could
        not be revoked, and must not be sent."""
        if self.revocations is None:
            return 0
        return self.revocations.take() or None

    def revoke(self, index: int) -> None:
        """From here on the store of this word commits nothing more."""
        if self.revocations is not None:
            self.revocations.revoke(index)

    def revoke_all(self) -> None:
        """The same for all stores under way."""
        if self.revocations is not None:
            self.revocations.revoke_all()

    def end(self, index: int) -> None:
        """Gives a word back. A rank may have given up waiting for the server, which may still be at
        work, so the word is revoked too."""
        if self.revocations is not None:
            self.revocations.end(index)
