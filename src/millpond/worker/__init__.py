"""The worker: claims, runs handlers and settles, over any transport. One loop per file.

Here are the parts that declarations need. `millpond.worker.worker` and its loops are imported when a worker runs.
"""

from millpond.worker.delivery import Delivery, current_delivery, in_handler
from millpond.worker.middleware import Handling, Middleware, check_middleware
from millpond.worker.subscription import SubscriberOptions, Subscription, subscription

__all__ = [
    "Delivery",
    "Handling",
    "Middleware",
    "SubscriberOptions",
    "Subscription",
    "check_middleware",
    "current_delivery",
    "in_handler",
    "subscription",
]
