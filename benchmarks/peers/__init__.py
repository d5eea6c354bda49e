"""What benchmarks share: environments of peers, processes of each side, and how a result is recorded."""
