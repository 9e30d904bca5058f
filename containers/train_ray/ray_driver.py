"""The command of every RayJob: `python ray_driver.py` in /app, by dropforge/platforms/ray."""

from containers.common.attempt import exit_now
from containers.train_ray.driver import main

if __name__ == "__main__":
    exit_now(main())
