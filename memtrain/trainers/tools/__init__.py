"""Tools beside training: bench, calibrate, doctor, export, merge, score."""
