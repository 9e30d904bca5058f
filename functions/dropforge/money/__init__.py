"""What runs and endpoints may cost, what they have cost, and what Google Cloud bills for the control plane."""
