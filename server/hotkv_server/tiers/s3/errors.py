"""What an S3 store says when it can't be used, in words that people can act on.

Always true: a message has no secret in it, and nothing of an answer but its code: stores repeat the
access key, and what they have signed, in their errors.
"""

import re

from hotkv_server.tiers.remote.errors import LateError, LostError, StoreError, UnusableError


class FullError(StoreError):
    """The store has no room."""


class BeyondError(StoreError):
    """The object is shorter than the range that was asked for."""


_STATUS = re.compile(r"status code: ([0-9]{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_SYSTEM = re.compile(r"Os\s*\{\s*code: [0-9]+,\s*kind: [A-Za-z]+,\s*message: \"([A-Za-z ]{1,80})\"")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*([A-Za-z]{1,40})")
_KEY = "rejects the access key: check credentials_file"
_ALLOW = (
    "forbids what hotkv needs: allow s3:GetObject, s3:PutObject and s3:DeleteObject on the prefix "
    "and s3:ListBucket on the bucket"
)
_REGION = "says that the bucket is in another region: set region"
_UNUSABLE = {
    "NoSuchBucket": "has no such bucket: create it, or set bucket",
    "InvalidBucketName": "has no such bucket: create it, or set bucket",
    "InvalidAccessKeyId": _KEY,
    "SignatureDoesNotMatch": _KEY,
    "InvalidToken": _KEY,
    "ExpiredToken": "says that the access key has expired: renew credentials_file",
    "RequestTimeTooSkewed": "says that this machine's clock is wrong: set it",
    "AccessDenied": _ALLOW,
    "AllAccessDisabled": _ALLOW,
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "NotImplemented": "does not know If-None-Match and If-Match, which a flush needs",
}
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "EntityTooLarge"})


def is_gone(said: str, is_404: bool) -> bool:
    """Whether an object can't be had, and nothing speaks against its store: it is not there, or it
    was moved to where it can't be read at once."""
    code = _CODE.search(said)
    return (is_404 and (code is None or code[1] != "NoSuchBucket")) or (
        code is not None and code[1] == "InvalidObjectState"
    )


def store_error(said: str) -> StoreError:
    """The error for what obstore says of one, other than an object that is not there."""
    code, status = _CODE.search(said), _STATUS.search(said)
    if code is not None and code[1] in _UNUSABLE:
        return UnusableError(_UNUSABLE[code[1]])
    if (code is not None and code[1] in _FULL) or (status is not None and status[1] == "507"):
        return FullError("has no room")
    if status is not None:
        return _by_status(status[1], code[1] if code is not None else "")
    certificate = _CERTIFICATE.search(said)
    if certificate is not None:
        return LostError(f"has a certificate that does not pass: {certificate[1]}")
    system = _SYSTEM.search(said)
    if system is not None and "kind: ConnectionRefused" in said:
        return LostError(f"refuses connections: {system[1]}")
    if "dns error" in said:
        return LostError("can't be reached: its host's name is not known")
    if "kind: Timeout" in said or "TimedOut" in said:
        return LateError("has not answered in time")
    if system is not None:
        return LostError(f"can't be reached: {system[1]}")
    return LostError("has broken off its answer")


def _by_status(status: str, code: str) -> StoreError:
    if status in ("401", "403"):
        return UnusableError(_ALLOW)
    if status == "301":
        return UnusableError(_REGION)
    if status == "416":
        return BeyondError("has an object that is shorter than it should be")
    return LostError(f"answers {status} {code}".rstrip())
