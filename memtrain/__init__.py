"""memtrain: post-training for scarce GPU memory, from a YAML recipe to a trained model."""

__version__ = "0.1.0"
