"""Device mesh, parallelism axes and communication between ranks. Independent of the GPT model."""
