"""Secure aggregation: a server learns the sum of clients' vectors, and nothing else of them.

K. Bonawitz et al.: Practical secure aggregation for privacy-preserving machine learning, CCS 2017,
figure 4, on the graph of J. H. Bell et al.: Secure single-server aggregation with
(poly)logarithmic overhead, CCS 2020. Without files and commands:

    plan, graph     how many neighbours and shares, from the number of clients; who is whose
    session         what an attempt at a round's sum is about, to which all else is bound
    signed          clients' messages and their signatures
    keys, shares, masks, survivors    what the steps send
    shamir          sharing of secrets
    promises        what a client has bound itself to
    participant, collector            a client's steps, and the server's

All messages are bytes, from a client to the server, or from the server to one client or to all:

    step        a client sends                     the server sends
    keys        fresh public keys                  its neighbours' keys, to each
    shares      shares of its secrets, encrypted   the shares for it, to each
    masked      its masked vector                  one list of survivors, to all
    survivors   its signature under the list       the list with enough signatures, to all
    unmask      of each neighbour, one share       (the sum)

Whoever is not there for a step is lost from there on. The sum has the bytes of the plain sum of the
survivors, in whole numbers.

Against whom. A server that follows the protocol, with up to G colluders, learns the sum of the
honest survivors. One that does not can neither change keys or lists, nor hide clients from each
other, nor repeat a round; but on a sparse graph it can lose clients of its choice after it has seen
the graph, and so learn sums of fewer. `graph: complete` leaves it nothing but the least number of
survivors. A client that sends a vector or masks of its choice spoils the sum, as it could without
masks: nobody can look at what is hidden.
"""
