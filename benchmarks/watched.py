"""Celery settings that turn on what Flower listens to, as it does by itself."""

worker_send_task_events = True
