"""`python -m frontend.cli` is `engine-client`."""

from frontend.cli import main

if __name__ == "__main__":
    main()
