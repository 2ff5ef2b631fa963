"""Vocabulary of Sluice: values shared by predictors, policies, backends, gateway and training."""
