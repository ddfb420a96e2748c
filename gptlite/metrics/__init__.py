"""What a run measures about itself, and where the numbers go."""
