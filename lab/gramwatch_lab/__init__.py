"""The lab: the paper, its networks and sets of images, training, studies and pictures."""
