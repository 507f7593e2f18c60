"""Handlers: `manage.py millpond run` imports the module `handlers` of every app."""

from django.db import connection, transaction

from millpond import Delivery
from millpond.integrations.django import pond
from shop.models import Order


@pond.subscriber("orders", max_workers=4)
def ship(body: dict, delivery: Delivery) -> None:
    with transaction.atomic():
        Order.objects.filter(pk=body["order"]).update(shipped=True)
        delivery.ack_sync(within=connection)  # the update and the ack happen together
