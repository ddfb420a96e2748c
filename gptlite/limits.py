"""Largest sizes that are accepted from configurations and files, so that a wrong one is refused before work grows with
it. A model or file beyond a limit is more likely a mistake, or hostile, than meant."""

# Files that are parsed as a whole. Parsing takes about ten times their size.
DOCUMENT_BYTES = 1 << 26  # JSON: manifests of thousands of tensors on thousands of ranks take some 10 MB
TOKENIZER_BYTES = 1 << 28  # tokenizer.json: the largest published ones, of 262k tokens, take 33 MB
YAML_BYTES = 1 << 20  # config.yaml: a run's takes about 5 kB
DEPTH = 64  # nesting of JSON and YAML: ours nests 6 deep, Hugging Face's files about 8

# Numbers.
DIGITS = 40  # of an integer in JSON: transformers writes 10^30 for no limit; 309 would overflow a float
INTEGER = 2**63 - 1  # NumPy and torch index with int64
SIZE = 2**31 - 1  # a dimension of a model: torch's kernels index with int32
LAYERS = 100_000  # the deepest published networks have about 1,000
EXPERTS = 1 << 18  # of all layers together: the largest published models have about 25,000
RANKS = 1 << 20  # of a run: the largest published ones have about 100,000
CELLS = 10_000  # of a sweep, each of which is composed before the first one starts
RAMP_SIZES = 10_000  # sizes of the global batch in a ramp-up
VOCABULARY = 1 << 24  # ids: the largest published vocabulary has about 1 million
SPECIAL_TOKENS = 1 << 16  # of a tokenizer: Llama 4 has 2,048
