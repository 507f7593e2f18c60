"""The worker: one loop a file, over any transport."""

from millpond.worker.delivery import Delivery, current_delivery
from millpond.worker.subscription import Subscription, subscription
from millpond.worker.worker import Worker

__all__ = ["Delivery", "Subscription", "Worker", "current_delivery", "subscription"]
