"""Fencing tokens that travel to other services: headers, ASGI, httpx, Celery."""
