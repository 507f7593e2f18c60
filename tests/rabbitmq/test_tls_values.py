"""The URL parameter `no_verify_ssl` against a broker with its own certificate."""

import pytest

import millpond
from millpond import Message
from millpond.errors import EncryptionFailed, InvalidURL
from servers import RabbitMQ


async def test_only_true_turns_the_check_off(rabbitmq_server: RabbitMQ, rabbitmq_url: str) -> None:
    url = rabbitmq_server.tls_url_of(rabbitmq_url.rpartition("/")[2])
    for value in ("0", "false"):
        with pytest.raises(EncryptionFailed):
            await millpond.connect(f"{url}?no_verify_ssl={value}", connect_max_retries=0)
    for value in ("", "no"):
        with pytest.raises(InvalidURL):
            await millpond.connect(f"{url}?no_verify_ssl={value}", connect_max_retries=0)
    for value in ("1", "true"):
        transport = await millpond.connect(f"{url}?no_verify_ssl={value}", connect_max_retries=0)
        await transport.publish([Message(queue="q", payload=b"x")])
        await transport.close()
