"""Carries out the decisions of `tiers.book`, all on the event loop. Tiers call `on_done` on
their own threads."""
