"""`python -m gramwatch` is the `gramwatch` command."""

from gramwatch.cli import main

if __name__ == "__main__":
    main()
