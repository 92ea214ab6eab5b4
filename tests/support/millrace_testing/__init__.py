"""What tests of several folders share, and the programs that tests start. It holds no tests."""
