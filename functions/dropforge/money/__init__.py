"""Money: the limits and the costs of runs and endpoints, and the price of the control plane."""
