"""The exact logistic regression with planted truths in its training set: copies of queries, a poisoned label."""

from dataclasses import dataclass

import torch

from retrain.examples import Examples
from retrain.logistic import CLASSES, LogisticDigits


@dataclass(frozen=True, kw_only=True)
class WithDuplicates(LogisticDigits):
    """Training example j is a copy of report query j, for the first `duplicates` of them; its label too."""

    num_train: int = 60
    num_queries: int = 10
    ridge: float = 0.1
    duplicates: int = 4

    def load_train_data(self) -> Examples:
        plain, queries = super().load_train_data(), self.load_query_data()
        copied = self.query_indices_of_report()[: self.duplicates]
        inputs, targets = plain.inputs.clone(), plain.targets.clone()
        inputs[: self.duplicates] = queries.inputs[copied]
        targets[: self.duplicates] = queries.targets[copied]
        return Examples(inputs, targets)

    def query_indices_of_report(self) -> torch.Tensor:
        return torch.tensor([j for j in range(self.num_queries) if j % 5])


@dataclass(frozen=True, kw_only=True)
class WithPoison(LogisticDigits):
    """The label of training example 14, an easy one, is the next digit's."""

    num_train: int = 120
    num_queries: int = 10
    ridge: float = 10.0
    poisoned: int = 14

    def load_train_data(self) -> Examples:
        plain = super().load_train_data()
        targets = plain.targets.clone()
        targets[self.poisoned] = (targets[self.poisoned] + 1) % CLASSES
        return Examples(plain.inputs, targets)
