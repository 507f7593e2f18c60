"""The names that `import millpond` provides, and the modules that it imports."""

import subprocess
import sys

import millpond

LAZY = ["asyncpg", "asyncmy", "typer", "rich", "click", "sqlite3", "aio_pika", "pyspark", "starlette", "sqlalchemy"]


def test_the_public_names_are_sorted_and_there() -> None:
    assert millpond.__all__ == sorted(millpond.__all__)
    assert len(set(millpond.__all__)) == len(millpond.__all__)
    for name in millpond.__all__:
        assert hasattr(millpond, name), name


def test_the_names_of_the_contract_are_public() -> None:
    contract = "Millpond Message Retry AckPolicy NackMessage RejectMessage LeaseLost Ack Nack Reject GiveBack connect"
    assert set(contract.split()) <= set(millpond.__all__)


def test_importing_millpond_imports_no_driver_and_no_command_line() -> None:
    code = f"import millpond, sys; print([name for name in {LAZY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_url_imports_the_driver_of_its_scheme_only() -> None:
    code = f"import millpond, sys; millpond.Millpond('sqlite:///x.db'); print([m for m in {LAZY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "['sqlite3']"
