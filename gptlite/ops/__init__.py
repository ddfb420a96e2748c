"""One public function per op: a reference now, a fused path where there is one. Import the op's own module."""
