"""Certificate authorities and certificates."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """A certificate authority. `path` is its own certificate."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.path = folder / f"{name}.pem"
        builder = self._builder(self._name, self._key.public_key(), DAY)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.path.write_bytes(
            builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        )
        return (
            builder.serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * DAY)
            .not_valid_after(now + lifetime)
        )

    def issue(
        self, name: str, *names: str, file: str = "", lifetime: datetime.timedelta = DAY
    ) -> tuple[Path, Path]:
        """Issues a certificate for `name`, for localhost, and for `names`: `spiffe://…` or host
        names. (Certificate, key), whose file name without suffix is `file`, by default `name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives: list[x509.GeneralName] = [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        alternatives += [
            x509.UniformResourceIdentifier(n) if "://" in n else x509.DNSName(n) for n in names
        ]
        builder = self._builder(_name(name), key.public_key(), lifetime)
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        usages = x509.ExtendedKeyUsage(
            [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        )
        signed = builder.add_extension(usages, critical=False).sign(self._key, hashes.SHA256())
        certificate, key_path = (
            self._folder / f"{file or name}.pem",
            self._folder / f"{file or name}.key",
        )
        certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        key_path.touch(mode=0o600)
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return certificate, key_path
