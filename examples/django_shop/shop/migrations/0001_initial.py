"""The table of orders."""

from django.db import migrations, models


class Migration(migrations.Migration):
    operations = [
        migrations.CreateModel(
            "Order",
            [
                ("id", models.BigAutoField(primary_key=True)),
                ("sku", models.CharField(max_length=50)),
                ("shipped", models.BooleanField(default=False)),
            ],
        )
    ]
