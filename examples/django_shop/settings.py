"""Settings of the example: one app, and Millpond in the same database."""

from pathlib import Path

SECRET_KEY = "only for this example"
INSTALLED_APPS = ["shop", "millpond.integrations.django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": Path("shop.db").absolute()}}
MILLPOND = {"DATABASE": "default"}
USE_TZ = True
TIME_ZONE = "UTC"  # of the log, as in the tables that the commands print
ROOT_URLCONF = "shop.urls"
ALLOWED_HOSTS = ["*"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
