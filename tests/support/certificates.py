"""Certificates of a test's own authority, as files.

authority = CertificateAuthority(tmp_path)
server = authority.credentials("server")
worker = authority.credentials("worker", common_name="trainer.worker-0")
"""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from ctr_ps.protos.wire.security.credentials import Credentials


class CertificateAuthority:
    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._authority = trustme.CA(organization_name=name)
        self.ca = folder / f"{name}.pem"
        self._authority.cert_pem.write_to_path(self.ca)

    def credentials(
        self, name: str, *, common_name: str = "", expired: bool = False, mutual: bool = True
    ) -> Credentials:
        """Writes a certificate for 127.0.0.1 and localhost, and its key; returns credentials of both sides.

        Those of a server that is not `mutual` ask callers for no certificate.
        """
        yesterday = datetime.now(UTC) - timedelta(days=1)
        issued = self._authority.issue_cert(
            "127.0.0.1",
            "localhost",
            common_name=common_name or None,
            not_after=yesterday if expired else None,
        )
        certificate, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        own = Credentials(certificate=str(certificate), key=str(key), ca=str(self.ca))
        return replace(own, client_ca=str(self.ca)) if mutual else own
