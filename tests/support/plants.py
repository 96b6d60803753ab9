"""The secrets that the security tests plant and look for."""

PASSWORD = "planted-redis-password"
API_KEY = "sk-test-planted-secret"
