import sys

from ondevice.run.cli import interrupt_once, main

interrupt_once()
sys.exit(main())
