"""The worker process: its Celery app, its configuration, and the command line."""
