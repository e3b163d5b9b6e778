"""Keeps hypothesis from measuring time: on a busy machine an example may take long."""

from hypothesis import HealthCheck, settings

settings.register_profile("honed", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("honed")
