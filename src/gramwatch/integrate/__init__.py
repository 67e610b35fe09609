"""One file per neighbour: Lightning and Ray Data."""
