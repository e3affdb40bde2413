/*
 * A fake RDMA device: the subset of libibverbs that InfiniStore's server needs to start and to serve over TCP.
 * Preloaded into the server only. Queue pairs are left to the real library, which refuses them.
 *
 * Layouts: struct ibv_port_attr and struct ibv_mr of rdma-core's <infiniband/verbs.h>.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { PORT_ACTIVE = 4, MTU_4096 = 5, LINK_LAYER_INFINIBAND = 1, ROOM = 4096 };

struct port {
    uint32_t state, max_mtu, active_mtu;
    int32_t gids;
    uint32_t capabilities, longest_message, bad_pkeys, bad_qkeys;
    uint16_t pkeys, lid, manager_lid;
    uint8_t lid_mask, virtual_lanes, manager_level, subnet_timeout, init_reply, width, speed, physical_state;
    uint8_t link_layer;
};

struct region {
    void *context, *domain, *address;
    size_t length;
    uint32_t handle, local_key, remote_key;
};

static char device[ROOM], context[ROOM], domain[ROOM];

void **ibv_get_device_list(int *count)
{
    void **list = calloc(2, sizeof *list);
    list[0] = device;
    if (count)
        *count = 1;
    return list;
}

void ibv_free_device_list(void **list) { free(list); }
const char *ibv_get_device_name(void *_device) { return "mlx5_0"; }
void *ibv_open_device(void *_device) { return context; }
int ibv_close_device(void *_context) { return 0; }
void *ibv_alloc_pd(void *_context) { return domain; }
int ibv_dealloc_pd(void *_domain) { return 0; }

int ibv_query_port(void *_context, uint8_t number, struct port *port)
{
    memset(port, 0, sizeof *port);
    port->state = PORT_ACTIVE;
    port->max_mtu = port->active_mtu = MTU_4096;
    port->gids = 1;
    port->lid = 1;
    port->link_layer = LINK_LAYER_INFINIBAND;
    return 0;
}

int ibv_query_gid(void *_context, uint8_t port, int index, void *gid)
{
    memset(gid, 0, 16);
    return 0;
}

void *ibv_reg_mr(void *_domain, void *address, size_t length, int access)
{
    struct region *region = calloc(1, sizeof *region);
    region->context = context;
    region->domain = domain;
    region->address = address;
    region->length = length;
    return region;
}

int ibv_dereg_mr(void *region)
{
    free(region);
    return 0;
}
