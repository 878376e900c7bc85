"""What really happens when training data is left out: tasks, subsets, training, and the store that keeps it all."""

import retrain.torchvision_on_cpu  # noqa: F401  (imported first: see that module for why)
