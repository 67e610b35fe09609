"""The README's quickstart: train a small network on digits, guard it, show what is flagged, save and load."""

import gramwatch
from gramwatch.inputs.demo import digits, photograph_patches, small_convnet, train

data = digits()
model = small_convnet()
train(model, data.train, data.train_labels)  # or any trained classifier of yours

guard = gramwatch.Guard(model)
guard.fit(data.train.split(256))  # any iterable of batches, such as a DataLoader
guard.calibrate(data.validation.split(256))

print(guard.members["gram"].taps)  # the watched tensors
print(guard(data.test[:5]))  # digits: nothing unusual
print(guard(photograph_patches(5)))  # pieces of photographs: flagged

guard.metadata["classes"] = list("01234567")
guard.save("guard.safetensors")  # keep it beside the checkpoint
guard = gramwatch.load("guard.safetensors", model)
