"""A private object store with the interface of S3 (moto), in memory."""

import sys
import urllib.error
import urllib.request

from servers.server import Server


class ObjectStore(Server):
    """Any account may use it. Its objects are gone when it stops."""

    name = "s3"

    def _account(self) -> str | None:
        return None  # a Python program: it needs no separate account

    def command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "--host", self.host, "--port", str(self.port)]

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/moto-api/", timeout=10):
                return True
        except (urllib.error.URLError, OSError):
            return False

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def create_bucket(self, name: str) -> str:
        """The URL of a new bucket."""
        request = urllib.request.Request(f"{self.url}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=60):
            return f"s3://{name}"

    @property
    def options(self) -> dict[str, str]:
        """Storage options for `deltalake`; the same names are variables of the environment."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
