"""Many inputs: a stream watched with a stated false-alarm rate, and a set of outliers chosen from many."""
