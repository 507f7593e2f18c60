"""One endpoint: take an order."""

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from millpond.integrations.django import publish
from shop.models import Order


@csrf_exempt
def take(request: HttpRequest) -> JsonResponse:
    with transaction.atomic():
        order = Order.objects.create(sku=request.POST["sku"])
        publish("orders", {"order": order.pk}, unique=f"order-{order.pk}")  # stored with the order, or not at all
    return JsonResponse({"order": order.pk})


urlpatterns = [path("orders", take)]
