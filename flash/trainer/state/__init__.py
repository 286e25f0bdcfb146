"""What a trainer keeps on disk: checkpoints, written aside and renamed."""
