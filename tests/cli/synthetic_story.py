"""A made-up run of the demo, for what is shown and reported."""

from __future__ import annotations

import math

from shoal.cli.demo.messages import EpochDone, Finished, PeerActivity, PeerStory, Progress, Story


def made_up_story() -> Story:
    """Four peers for 90 s. Peer 4 is killed at 30 s, one slow round follows; peer 5 starts at 45 s, is in at 51 s."""
    story = Story(4, 90.0, files=462, unigram_entropy=3.163, bigram_entropy=2.422, now=92.0, stopped=90.0)
    story.killed, story.joined = (30.0, 4), (45.0, 5)
    for number in range(1, 6):
        story.peers[number] = _peer(number)
    return story


def _peer(number: int) -> PeerStory:
    first, last = (51.0 if number == 5 else 0.0), (30.0 if number == 4 else 92.0)
    peer = PeerStory(
        number, PeerActivity.FINISHED, started=45.0 if number == 5 else -5.0, peer_id=f"12D3KooWpeer{number}"
    )
    peer.caught_up = first
    for epoch in range(1, 93):
        time = float(epoch)
        if first < time <= last:
            slow = 2.0 if epoch == 31 else 0.3
            peer.epochs.append((time, EpochDone(epoch, slow, 4 if time < 30 or time > 51 else 3)))
            if (epoch + number) % 4 == 0:
                peer.curve.append((time, epoch, 1.8 + 3.7 * math.exp(-time / 15)))
    peer.progress = Progress(int(last), 92, 11000 - 1000 * number, 150.0, 1.9, None, 150_000_000, 149_000_000, 4)
    if number == 4:
        peer.state = PeerActivity.KILLED
    else:
        peer.finished = Finished(92, 11000 - 1000 * number, 1.81, "ab" * 32, "def f(x):\n    return x")
    return peer
