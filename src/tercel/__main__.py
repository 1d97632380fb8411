"""`python -m tercel`, which `torchrun -m tercel` runs in every process."""

from tercel.cli.app import main

if __name__ == "__main__":
    main()
