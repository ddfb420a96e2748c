"""Random legal configurations, each trained with parity to one process or refused with a fix."""
