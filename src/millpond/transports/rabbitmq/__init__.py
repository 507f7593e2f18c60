"""RabbitMQ behind the seam."""

from millpond.transports.rabbitmq.opening import connect

__all__ = ["connect"]
