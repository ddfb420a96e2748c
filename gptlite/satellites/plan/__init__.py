"""Planning of layouts before a run: memory, traffic and time, predicted without the devices."""
