"""What a layout takes before it runs: memory, traffic, time. Nothing here needs the devices it speaks of."""
