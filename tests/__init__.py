"""Tests of the package: unit tests in its rooms, functional tests by theme."""
