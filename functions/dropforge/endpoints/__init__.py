"""Named endpoints: their records in the runs bucket. The rollouts that change them are in stages/rollout/."""
