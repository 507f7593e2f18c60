"""RabbitMQ behind the seam."""

from millpond.transports.rabbitmq.connect import check_address, check_options, connect

__all__ = ["check_address", "check_options", "connect"]
