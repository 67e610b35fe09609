"""What a study needs and a guard does not: the paper, its networks and sets of images, training, pictures."""
