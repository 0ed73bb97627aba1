"""The cases whose system under test is a client: doors, a scripted server, and what is measured."""
