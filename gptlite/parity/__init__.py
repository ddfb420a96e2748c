"""Two layouts of one configuration, step by step: recorded, compared, and the first difference named."""
