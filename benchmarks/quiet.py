"""Celery settings that turn off what Flower listens to, as a user would give them."""

worker_send_task_events = False
task_send_sent_event = False
